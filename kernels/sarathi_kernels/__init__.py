"""Operations of a paged-KV decoder in plain torch. Imports nothing of the lab; shapes are stated
per function.
"""
