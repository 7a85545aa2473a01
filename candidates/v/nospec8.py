BASE = 'cand'
PATCH = {'sm90/mla_decode_fp8.py': [('self.speculate = True', 'self.speculate = False'), ('self.registers = (104, 192, 24)', 'self.registers = (120, 184, 24)')]}