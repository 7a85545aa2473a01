BASE = 'cand'
PATCH = {'sm90/mla_decode.py': [('EARLY_STEPS = 8', 'EARLY_STEPS = 4')]}