"""The Airflow side of Trainyard."""
