# What pipeline steps and the scheduler run: the trainer's image with Kubeflow Pipelines' SDK, which training must not
# have (it pins requests, urllib3 and protobuf). build.sh builds it on the trainer for CPUs.
ARG TRAINER
# hadolint ignore=DL3006
FROM ${TRAINER}
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
USER 0
WORKDIR /build
COPY constraints.txt dist/caltune-*.whl ./
RUN wheel=$(ls caltune-*.whl) \
 && pip install --constraint constraints.txt "${wheel}[kubeflow]" \
 && pip check \
 && rm -rf /build
USER 1000:1000
WORKDIR /home/caltune
ENTRYPOINT ["caltune"]
CMD ["--help"]
