PATCH = {'sm90/choose.py': [('FEW_ROWS = 32', 'FEW_ROWS = 16')]}
