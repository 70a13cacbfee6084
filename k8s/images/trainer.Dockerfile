# What Ray's pods run: caltune with torch for CPUs or for CUDA. build.sh builds it, from the repository root with the
# wheel in dist/. VARIANT is cpu or cuda. TORCH_INDEX_URL is PyTorch's own index of CPU builds, which its installation
# page names; without it torch comes with CUDA's libraries. The build fails where VARIANT and what was installed differ.
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
ARG TORCH_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/caltune/bin:$PATH
# Debian keeps only the newest build of a package, so a pinned one would soon be gone.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/* \
 && python -m venv /opt/caltune
WORKDIR /build
COPY constraints.txt ./
RUN pip install --constraint constraints.txt setuptools wheel ninja packaging
RUN if [ -n "$TORCH_INDEX_URL" ]; then \
      pip install --constraint constraints.txt --index-url "$TORCH_INDEX_URL" --no-deps torch; \
    else \
      pip install --constraint constraints.txt torch; \
    fi
COPY dist/caltune-*.whl ./
# DeepSpeed is built from source, where torch is; its operators are compiled when first used.
RUN pip install --constraint constraints.txt --no-build-isolation caltune-*.whl \
 && pip check
ARG VARIANT
RUN built=$(python -c "import torch; print('cuda' if torch.version.cuda else 'cpu')") \
 && if [ "$built" != "$VARIANT" ]; then echo "VARIANT is '$VARIANT', torch is built for $built" >&2; exit 1; fi

FROM python:${PYTHON}
# bash and wget: KubeRay starts Ray and asks after its health with them. g++: DeepSpeed compiles operators for CPUs.
# hadolint ignore=DL3008,SC2016
RUN apt-get update \
 && apt-get install --yes --no-install-recommends bash g++ wget \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home --shell /bin/bash caltune \
 # KubeRay starts Ray in a login shell, which sets PATH anew.
 && echo 'PATH=/opt/caltune/bin:$PATH' > /etc/profile.d/caltune.sh
COPY --from=build /opt/caltune /opt/caltune
ENV PATH=/opt/caltune/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
WORKDIR /home/caltune
ENTRYPOINT ["caltune"]
CMD ["--help"]
