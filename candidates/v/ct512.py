BASE = 'early'
PATCH = {'sm90/decode_combine.py': [('COMBINE_THREADS = 1024', 'COMBINE_THREADS = 512'), ('COMBINE_GROUP = 512', 'COMBINE_GROUP = 256')]}