BASE = 'rs8'
PATCH = {'sm90/mla_decode_fp8.py': [('FRAGMENTS = 1 ', 'FRAGMENTS = 2 ')]}
