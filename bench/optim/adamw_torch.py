"""The rate of torch.optim.AdamW(fused=True), to hold against `sluice bench optimizer`: adamw_torch.py [threads] [steps]"""
import sys
import time

import torch

PARAMETERS = 64 << 20

torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 10
parameter = torch.nn.Parameter(torch.randn(PARAMETERS) * 0.02)
parameter.grad = torch.randn(PARAMETERS) * 0.01
optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, fused=True)
optimizer.step()
times = []
for _ in range(steps):
    begin = time.perf_counter()
    optimizer.step()
    times.append(time.perf_counter() - begin)
print(f"median {PARAMETERS / sorted(times)[steps // 2] / 1e9:.2f}, best {PARAMETERS / min(times) / 1e9:.2f} Gparam/s")
