# Stands in for prom/prometheus where no registry can be reached: Debian's build of the program, begun as theirs is.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
COPY prometheus /bin/prometheus
RUN install -d -o 65534 -g 65534 /prometheus
USER 65534
VOLUME /prometheus
ENTRYPOINT ["/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
