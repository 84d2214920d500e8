# In python:3.13.9-slim-trixie's place, made as the public image is: Debian with CPython in /usr/local, from the
# source package that Debian has, with pip.
FROM debian:trixie-slim AS build
RUN sed 's/^deb /deb-src /' /etc/apt/sources.list > /etc/apt/sources.list.d/source.list \
    && apt-get update && apt-get install -y --no-install-recommends dpkg-dev gcc libbz2-dev libc6-dev \
        libffi-dev liblzma-dev libreadline-dev libsqlite3-dev libssl-dev make uuid-dev xz-utils zlib1g-dev
WORKDIR /usr/src/python
RUN apt-get source --download-only python3.13 && tar -xf python3.13_*.orig.tar.xz --strip-components=1
RUN ./configure -q --prefix=/usr/local --enable-shared --enable-loadable-sqlite-extensions \
        LDFLAGS='-Wl,-rpath,/usr/local/lib -Wl,--strip-all' \
    && nice -n 5 make -s -j"$(nproc)"
RUN make -s install && find /usr/local -depth \( -type d -name test -o -type d -name idle_test \
        -o -name '*.a' -o -name '*.pyc' \) -exec rm -rf '{}' + \
    && for name in python pip pydoc idle; do ln -s ${name}3 /usr/local/bin/$name; done

FROM debian:trixie-slim
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates libbz2-1.0 libffi8 \
        liblzma5 libreadline8t64 libsqlite3-0 libssl3t64 libuuid1 netbase tzdata zlib1g \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /usr/local /usr/local
RUN ldconfig && python3 -c 'import bz2, ctypes, lzma, readline, sqlite3, ssl, zlib' && pip --version
CMD ["python3"]
