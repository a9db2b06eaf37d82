"""A loop of steps in one process: `one_process.py ROLE DIRECTORY`.

Roles: run (until stopped), sleep (hangs in step 3), phase (an evaluation longer than a step),
native (long native code before the first step), ended (waits after the last step).
"""

import hashlib
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[3]))

from mtjax.operation.faults import EarlyEnd, StopRequest, Watchdog

ROLE, DIRECTORY = sys.argv[1:]


def main() -> None:
    with Watchdog(0.5, DIRECTORY, startup_s=30.0) as watchdog, StopRequest() as stop:
        for step in range(1, 1000):
            if ROLE == "sleep" and step == 3:
                time.sleep(3600)
            if ROLE == "phase" and step == 3:
                with watchdog.phase("evaluation", 30.0):
                    time.sleep(1.2)
                return
            time.sleep(0.02)
            watchdog.beat(step)
            print(f"step {step}", flush=True)
            if stop.requested:
                print(f"saved at step {step} after {stop.signal_name}", flush=True)
                break
    print("left the loop", flush=True)


def native() -> None:
    """Minutes within one call, as while XLA compiles."""
    print("compiling", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)


with EarlyEnd("nothing was trained"):
    if ROLE == "native":
        native()
    main()
    if ROLE == "ended":
        time.sleep(3600)
