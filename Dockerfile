# The example project, for docker-compose.yml. Not what you deploy: your own project installs django-callqueue.
FROM python:3.12.12-slim-bookworm

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    DJANGO_SETTINGS_MODULE=example_project.settings \
    PYTHONPATH=/app

WORKDIR /app

COPY pyproject.toml README.md LICENSE ./
COPY callqueue ./callqueue
COPY docs ./docs
COPY example_project ./example_project
RUN pip install --constraint example_project/constraints.txt ".[postgres,beat,redis,encryption,metrics]" gunicorn

RUN useradd --create-home --uid 10001 app
USER app

EXPOSE 8000
CMD ["gunicorn", "example_project.wsgi:application", "--bind", "0.0.0.0:8000"]
