# A GPU image with vLLM. The quickstart needs none of this: `make train` runs on a laptop.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /paw
ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv && pip install --no-cache-dir torch==2.13.0
COPY . .
RUN pip install --no-cache-dir -e ".[vllm,alfworld]"
# The CUDA kernels, against the torch that is here now, which an isolated build would not see; nvcc needs no GPU for it.
RUN pip install --no-cache-dir "setuptools>=77" \
    && PAW_BUILD_CUDA=1 pip install --no-cache-dir --no-build-isolation --no-deps -e .
ENTRYPOINT ["paw"]
