"""Frames inside of what people already run: one file for each host framework, none imported by the rest.

exchange.py         frames between the ranks of a group, and the choice of a codec by measurement
torch_pipelines.py  the schedules of torch.distributed.pipelining
data_parallel.py    gradients of DistributedDataParallel, shards of FSDP2
transformers.py     Trainer of Hugging Face, whose model is cut into stages
lightning.py        a strategy of Lightning, whose module is cut into stages
fsspec.py           files through the sample cache, for whatever reads by fsspec
mosaicml.py         shards of StreamingDataset that stay by their next use
"""
