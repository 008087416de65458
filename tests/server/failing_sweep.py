"""The server over the fake engine, whose first sweep of the waiting queue raises."""

from __future__ import annotations

import logging
import runpy
from itertools import count

from headway.server.admission import AdmissionController

refuse_expired = AdmissionController.refuse_expired
numbers = count(1)


async def faulty_sweep(self: AdmissionController) -> None:
    number = next(numbers)
    if number == 1:
        raise KeyError("a fault in the sweep")
    if number == 2:
        logging.getLogger(__name__).warning("the sweep goes on")
    await refuse_expired(self)


if __name__ == "__main__":
    AdmissionController.refuse_expired = faulty_sweep
    runpy.run_module("benchmarks.support.fake_server", run_name="__main__")
