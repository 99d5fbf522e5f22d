"""Rates that kinds of devices reach, calibrated on one half of the rows and checked on the other.

A preset's shares of the peak rates are the same for all kinds of models. The table here has a factor on the
seconds of a step by kind of device, arithmetic and kind of data, from the rows of the calibration half
(`Row.half`). It is beside the presets, not in them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping

from scores import Record, over

LEAST = 3  # rows of a kind, for a factor


def factors(records: Iterable[Record]) -> dict[str, float]:
    """Return the median ratio of measured to predicted seconds, by kind of device, arithmetic and data, of one half."""
    ratios = defaultdict(list)
    for record in records:
        if record["half"] == "calibration" and (error := over(record, "seconds")) is not None:
            ratios[record["rates"]].append(1 / (1 + error))
    return {name: statistics.median(found) for name, found in sorted(ratios.items()) if len(found) >= LEAST}


def calibrated(record: Record, table: Mapping[str, float]) -> Record:
    """Return the record with seconds multiplied by the factor of its kind."""
    if "seconds" not in record["predicted"] or record["rates"] not in table:
        return record
    seconds = record["predicted"]["seconds"] * table[record["rates"]]
    return {**record, "predicted": {**record["predicted"], "seconds": seconds}}
