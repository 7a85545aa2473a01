BASE = 'cand'
PATCH = {'sm90/mla_decode.py': [('self.speculate = self.rescale_bits > 0.0', 'self.speculate = False')], 'sm90/mla_decode_fp8.py': [('self.speculate = True', 'self.speculate = False')]}