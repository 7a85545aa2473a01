BASE = 'cand'
PATCH = {'sm90/mla_decode_fp8.py': [('EARLY_STEPS = 4', 'EARLY_STEPS = 2')]}