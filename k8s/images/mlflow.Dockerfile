# The tracking server, with drivers for PostgreSQL and S3; nothing of caltune. build.sh builds it.
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/mlflow/bin:$PATH
WORKDIR /build
COPY constraints.txt ./
RUN python -m venv /opt/mlflow \
 && pip install --constraint constraints.txt mlflow psycopg[binary] boto3 \
 && pip check

FROM python:${PYTHON}
RUN useradd --uid 1000 --create-home --shell /usr/sbin/nologin caltune
COPY --from=build /opt/mlflow /opt/mlflow
ENV PATH=/opt/mlflow/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
WORKDIR /home/caltune
ENTRYPOINT ["mlflow"]
CMD ["server", "--help"]
