#!/bin/sh
# Runs once, when the Postgres volume is empty: one user and one database for each of MLflow and Prefect.
set -eu
psql --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname postgres \
  --set mlflow_password="$MLFLOW_DB_PASSWORD" --set prefect_password="$PREFECT_DB_PASSWORD" <<'SQL'
CREATE USER mlflow PASSWORD :'mlflow_password';
CREATE DATABASE mlflow OWNER mlflow;
CREATE USER prefect PASSWORD :'prefect_password';
CREATE DATABASE prefect OWNER prefect;
\connect prefect
CREATE EXTENSION IF NOT EXISTS pg_trgm;
SQL
