BASE = 'rs8'
PATCH = {'sm90/mla_decode_fp8.py': [('AHEAD = 4 ', 'AHEAD = 8 ')]}
