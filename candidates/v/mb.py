PATCH={"sm90/decode_kernel.py":[("block=[self.combine_threads, 1, 1], stream=stream, use_pdl=True)","block=[self.combine_threads, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1)")]}
