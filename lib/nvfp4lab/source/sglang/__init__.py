"""SGLang's constructs, one file each, read into facts. `nvfp4lab.source.sglang_facts` joins them."""
