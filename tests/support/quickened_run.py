"""`python -m sarathi_lab.run` in a process that begins as those of tests do."""

import runpy

import quickened

quickened.quicken()
runpy.run_module("sarathi_lab.run", run_name="__main__", alter_sys=True)
