"""What runs inside a replica or a data task; never imports airflow."""
