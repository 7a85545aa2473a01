BASE = 'combrs'
PATCH = {'sm90/mla_decode_fp8.py': [('EARLY_STEPS = 3 ', 'EARLY_STEPS = 5 ')]}
