"""What runs inside a replica: the launcher (process 1) and the trainer process that it keeps going.

launcher     process 1: start barrier, restarts, stall watch, SIGTERM, termination message; standard library
command      the command of a role in place of our trainer: its variables, and its start
command_launcher, command_watch  the launcher of such a command; standard library
attempts     the processes of one replica, as the record has them
process      starting and ending the trainer process: a fork of a warm interpreter, or a new one
logs         the trainer's output, passed through line by line, its tail kept
message_files  where a trainer leaves its termination message for its launcher
local_gang   all launchers of a plan as processes of this machine, for tests and benchmarks
trainer      the trainer process: passive servers (ps, worker), or strategy and loop (chief, all-reduce peers)
strategies   which strategies there are, and how each is set up
success      workers that were given up, and whether enough are left
loop         the training loops: in-graph (local, mirrored, multi_worker) and coordinated (parameter_server)
steps        one training step, and K of them in one tf.function
context      TrainerContext: what user code may know of the job it runs in
module       the user's trainer module, checked
datasets     records -> (features, label) batches
checkpoints  atomic checkpoints, the newest readable one restored
heartbeat    progress of the run, and the thread that writes it to the record
tracking     the spool of params, metrics and tags; `deliver` sends it to MLflow
restore      load_trained(job_folder): a plain model with the trained weights
blame        exceptions of TensorFlow and of user code -> Failure, with the user's own traceback
lean         importing TensorFlow without what a replica never uses
loopback     keeps TensorFlow's server on loopback
"""
