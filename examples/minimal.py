"""The README's script: ``torchrun --nproc-per-node 2 examples/minimal.py``."""

import torch
import torch.distributed as dist
import torchvision

import mgwfbp

dist.init_process_group()  # torchrun says who takes part
cuda = torch.cuda.is_available()
device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if cuda else "cpu"
net = torchvision.models.mobilenet_v2(num_classes=10).to(device)
model = mgwfbp.DistributedDataParallel(net)  # where torch's DistributedDataParallel stood
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1000):
    images = torch.randn(4, 3, 64, 64, device=device)
    labels = torch.randint(10, (4,), device=device)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    if step % 200 == 199 and dist.get_rank() == 0:
        print(model.tuning)
dist.destroy_process_group()
