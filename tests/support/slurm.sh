#!/bin/bash
# slurm.sh install | start DIRECTORY | stop DIRECTORY: a Slurm of one node on a bare Debian or Ubuntu machine, as root
# and without systemd. The node pretends to 8 CPUs and two kinds of GPUs, so that jobs run beside each other and ask for
# GPUs by type; there is no accounting, so sacct does not answer, as on many a small cluster.
# `start` prints the environment that clients need. Everything but munge's key and socket lies in DIRECTORY.
set -eu
command=$1 directory=${2:-}

install() {
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge
}

start_munge() {
    munge --no-input >/dev/null 2>&1 && return # one runs
    mkdir -p /run/munge
    chown munge: /run/munge
    [ -e /etc/munge/munge.key ] || runuser -u munge -- mungekey
    runuser -u munge -- munged --force
}

configure() {
    local host
    host=$(hostname -s)
    mkdir -p "$directory/state" "$directory/spool"
    cat >"$directory/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=0,requeue_setup_env_fail
SlurmdParameters=config_overrides
StateSaveLocation=$directory/state
SlurmdSpoolDir=$directory/spool
SlurmctldPidFile=$directory/slurmctld.pid
SlurmdPidFile=$directory/slurmd.pid
SlurmctldLogFile=$directory/slurmctld.log
SlurmdLogFile=$directory/slurmd.log
ReturnToService=2
KillWait=2
MpiDefault=none
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 RealMemory=2000 Gres=gpu:h100:2,gpu:a100:1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    for number in 0 1 2; do # stand for the devices of GPUs
        [ -e "$directory/gpu$number" ] || mknod "$directory/gpu$number" c 1 3
    done
    cat >"$directory/gres.conf" <<CONF
Name=gpu Type=h100 File=$directory/gpu[0-1]
Name=gpu Type=a100 File=$directory/gpu2
CONF
}

start() {
    start_munge
    configure
    export SLURM_CONF=$directory/slurm.conf
    slurmctld -i
    slurmd
    for _ in $(seq 100); do # until the node is there
        sinfo --noheader --format=%T 2>/dev/null | grep -q idle && break
        sleep 0.1
    done
    sinfo --noheader --format=%T | grep -q idle
    echo "SLURM_CONF=$SLURM_CONF"
}

stop() {
    export SLURM_CONF=$directory/slurm.conf
    scancel --me
    for _ in $(seq 100); do # until its jobs have ended
        [ -n "$(squeue --noheader)" ] || break
        sleep 0.1
    done
    for daemon in slurmd slurmctld; do
        [ ! -e "$directory/$daemon.pid" ] || kill "$(cat "$directory/$daemon.pid")" || true
    done
}

"$command"
