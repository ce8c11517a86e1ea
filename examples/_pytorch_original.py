"""The script that `from_pytorch.py` ports: to be read, or run with torch on a GPU."""

import _digits
import torch
from torch import nn

images, labels = _digits.labelled_batches(300, 256)
model = nn.Sequential(
    nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10)
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")

for x, y in zip(images[:], labels[:], strict=True):
    x, y = torch.from_numpy(x).cuda(), torch.from_numpy(y).long().cuda()
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()

print(f"loss {loss:.4f}, S = {scaler.get_scale():g}")
