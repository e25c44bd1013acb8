"""The task `validate`: a recorded run of a real server beside its simulated replay, as it was run
and with other settings. From a file to a comparison:

1. `bench_files` finds the reader of a client's file (`readers`), which gives a `Load` in the file's
   own terms, and `benchmark` checks its requests: a `Benchmark`. `run_folder` makes one of a
   folder, `iteration_log` reads the iterations of a server's log.
2. `server_facts` and `server_commands` read what logs, files and commands state of the server.
   `real_run` joins these statements with the benchmark: a `RealRun` for each load.
3. `settings` decides what of files, user and defaults holds, and `run_config` composes the
   configuration: of the run as it was, and with what the user asks besides.
4. `cases` makes a `Replay` of each: engine, devices, and requests as the client sent them
   (`clients`, `sent_again`).
5. `comparison` and `picture` set the served requests beside the recorded ones, and `validation` is
   the task that prints and keeps them.
"""

from sarathi_lab.extensions.replay.validation import Validate

__all__ = ["Validate"]
