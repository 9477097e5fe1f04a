"""The embedded model server: TF Serving's gRPC and REST APIs on a machine that has no TF Serving.

python -m serving.server --port 8500 --rest_api_port 8501 --model_config_file models.config

flags        TF Serving's flags -> Options
app          one server process: ports first, TensorFlow next, models last; drain on SIGTERM
manager      versions: policies, polling, loads that keep the old one serving, labels, reload
servable     one loaded version: session, signatures, warm-up
batching     requests of many callers in one run
calls        what the API's methods do, free of transport
grpc_api  rest  rest_json     the two transports
metrics      Prometheus page under TF Serving's names
"""
