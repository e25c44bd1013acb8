from sarathi_kernels.launch import Launch
def record(chip, quick): return []
