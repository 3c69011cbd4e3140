# Second step: the guest, a layer of a few hundred kilobytes. A new version of Glovebox repeats only this one.
ARG RUNTIME

FROM ${RUNTIME} AS build
LABEL dev.glovebox.stage=build
USER 0:0
COPY guest /guest
COPY finish.py /tmp/finish.py
RUN ["python3", "-I", "/tmp/finish.py", "guest"]

FROM ${RUNTIME}
COPY --from=build /guest /guest
