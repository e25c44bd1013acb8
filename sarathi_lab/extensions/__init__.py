"""Features beyond the core, a folder each. They may import the core, which never imports them:
Hydra finds them by the `_target_` of an option.
"""
