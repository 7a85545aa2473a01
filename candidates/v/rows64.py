BASE = 'cand'
PATCH = {'sm90/mla_decode_fp8.py': [('self.p_rows = next(n for n in (16, 32, 64) if n >= min(rows, ROWS))', 'self.p_rows = ROWS')]}