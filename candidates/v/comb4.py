BASE='comb'
PATCH={'sm90/decode_combine.py':[('{32: 2, 16: 8}','{32: 2, 16: 4}')]}
