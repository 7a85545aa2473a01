BASE = 'first2'
PATCH = {'sm90/decode_ring.py': [('FIRST_COPIES = 3 ', 'FIRST_COPIES = 5 ')]}
