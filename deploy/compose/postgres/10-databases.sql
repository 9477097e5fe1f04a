-- Run once, by the image's entrypoint, when the volume is empty: a database and a user each for Airflow and MLflow,
-- who can't open each other's. Passwords come from the container's environment, never from a command line.
\getenv airflow_password AIRFLOW_DB_PASSWORD
\getenv mlflow_password MLFLOW_DB_PASSWORD

CREATE ROLE airflow LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD :'airflow_password';
CREATE DATABASE airflow OWNER airflow ENCODING 'UTF8' TEMPLATE template0;
REVOKE ALL ON DATABASE airflow FROM PUBLIC;

CREATE ROLE mlflow LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD :'mlflow_password';
CREATE DATABASE mlflow OWNER mlflow ENCODING 'UTF8' TEMPLATE template0;
REVOKE ALL ON DATABASE mlflow FROM PUBLIC;

REVOKE CONNECT ON DATABASE postgres FROM PUBLIC;
