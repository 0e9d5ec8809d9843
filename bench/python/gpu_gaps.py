#!/usr/bin/env python3
"""Prints when a GPU was idle in a trace of gpu_vs_pytorch.py --trace FOLDER, and why.

    python3 bench/python/gpu_gaps.py FOLDER/sluice.trace.json.gz

The computing stream is the one whose kernels take longest. A gap on it ends with work that the host had queued before, so the stream waited
for other work of the GPU, or with work that the host queued late. For each gap the output lists the copies in flight, and for each stream its
total work. The profiler itself stops a step now and then, for 50 to 250 ms: a gap that occurs once means nothing."""
import argparse
import collections
import gzip
import json


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--gaps", type=int, default=20, help="how many of the longest are shown, by default 20")
    return parser.parse_args()


def read(path):
    """Returns the GPU's work, in order, each as (begin, end, stream, event), in ms; and the times of queueing, by
    correlation."""
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    first = min((e["ts"] for e in events if e.get("cat") in ("kernel", "gpu_memcpy")), default=0)
    queued = {e["args"]["correlation"]: (e["ts"] - first) / 1e3 for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    done = [((e["ts"] - first) / 1e3, (e["ts"] - first + e["dur"]) / 1e3, e["args"]["stream"], e)
            for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(done, key=lambda each: each[0]), queued


def gaps_of(done, queued, stream):
    """The gaps of a stream: (begin, length, the event that ended it, why)."""
    end, found = None, []
    for begin, until, on, event in done:
        if on != stream:
            continue
        if end is not None and begin > end:
            at = queued.get(event["args"].get("correlation"))
            why = "" if at is None else "the GPU waited" if at <= end else f"queued {at - end:.2f} ms after its begin"
            found.append((end, begin - end, event["name"], why))
        end = until if end is None else max(end, until)
    return found


def main():
    a = arguments()
    done, queued = read(a.trace)
    if not done:
        raise SystemExit(f"{a.trace} has nothing that a GPU did; gpu_vs_pytorch.py --trace FOLDER writes such traces")
    kernels, lines = collections.Counter(), collections.defaultdict(lambda: [0, 0.0, 0])
    for begin, until, stream, event in done:
        kernels[stream] += (until - begin) * (event["cat"] == "kernel")
        line = lines[stream, event["cat"] if event["cat"] == "kernel" else event["name"]]
        line[0] += 1
        line[1] += until - begin
        line[2] += event["args"].get("bytes", 0)
    for (stream, what), (count, took, size) in sorted(lines.items(), key=lambda each: -each[1][1]):
        rate = f", {size / 1e9:.2f} GB at {size / 1e6 / took:.1f} GB/s" if size and took else ""
        print(f"stream {stream}: {count} times {what}, {took:.1f} ms{rate}")
    computing = max(kernels, key=kernels.get)
    gaps = gaps_of(done, queued, computing)
    print(f"stream {computing} computes, and had nothing to do for {sum(gap[1] for gap in gaps):.1f} of {max(each[1] for each in done):.1f} ms; its longest gaps:")
    for begin, length, name, why in sorted(gaps, key=lambda gap: -gap[1])[: a.gaps]:
        copies = collections.Counter(stream for other, until, stream, event in done
                                     if event["cat"] == "gpu_memcpy" and other < begin + length and until > begin)
        beside = ", ".join(f"{count} copies on {stream}" for stream, count in sorted(copies.items()))
        print(f"  at {begin:8.1f} ms {length:6.2f} ms, before {name[:40]} ({why or 'the trace does not say when that was queued'}); beside it {beside or 'nothing'}")


if __name__ == "__main__":
    main()
