BASE='comb'
PATCH={'sm90/decode_combine.py':[('COMBINE_THREADS = 512','COMBINE_THREADS = 1024'),('{32: 2, 16: 8}','{32: 2, 16: 2}')]}
