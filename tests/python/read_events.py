"""Prints what TensorBoard reads of a log's run: `python read_events.py FOLDER`.

A line per number: tag, step and value; per histogram tag, step, count, least, greatest, sum and the counts of buckets; and the number of the
graph's nodes.
"""

import sys

from tensorboard.backend.event_processing import event_accumulator

KINDS = [
    event_accumulator.SCALARS,
    event_accumulator.HISTOGRAMS,
    event_accumulator.COMPRESSED_HISTOGRAMS,
]
log = event_accumulator.EventAccumulator(sys.argv[1], dict.fromkeys(KINDS, 0))
log.Reload()
tags = log.Tags()
for tag in sorted(tags["scalars"]):
    for event in log.Scalars(tag):
        print("scalar", tag, event.step, repr(event.value))
for tag in sorted(tags["histograms"]):
    for event in log.Histograms(tag):
        h = event.histogram_value
        limits = ",".join(repr(x) for x in h.bucket_limit)
        counts = ",".join(repr(x) for x in h.bucket)
        print("histogram", tag, event.step, h.num, h.min, h.max, limits, counts)
if tags["graph"]:
    print("nodes", len(log.Graph().node))
