"""The experiments behind the claims: the same points measured on a device, in pairs, or computed by
a cost model.
"""
