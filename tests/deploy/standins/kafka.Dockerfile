# Stands in for apache/kafka:4.3.1 where no registry can be reached: the same jars, started by the same variables.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
COPY java /opt/java
COPY jars /opt/kafka/libs
COPY kafka.sh /etc/kafka/docker/run
RUN chmod -R a+rX /opt && chmod a+rx /etc/kafka/docker/run && \
    useradd --uid 1000 kafka && install -d -o 1000 -g 1000 /var/lib/kafka/data
USER 1000
VOLUME /var/lib/kafka/data
CMD ["/etc/kafka/docker/run"]
