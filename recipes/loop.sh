#!/bin/sh
# Runs a command again while it ends with 75 (interrupted, a good checkpoint is on the disk), and passes any other status
# on: for a machine without a scheduler, in tmux or under nohup.
#
#   sh recipes/loop.sh python ppo_atari.py --env-id BreakoutNoFrameskip-v4 --amp
#
# Nothing has to be edited; LOOP_PAUSE is the number of seconds between tries (5). A signal to the loop stops the command
# and the loop. Tried with dash and bash, with played commands and with ppo_atari.py.

if [ $# -eq 0 ]; then
  echo "usage: sh $0 COMMAND [ARGUMENT]..." >&2
  exit 2
fi

stop='' came='' child=''

# Always SIGTERM: sh starts what runs in the background with SIGINT ignored, until the command sets a handler of its own.
forward() {
  stop=1 came=1
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap forward TERM INT HUP USR1

# In the background, because a shell that waits for a command in the foreground answers no signal.
run() {
  "$@" &
  child=$!
  ended=''
  while :; do
    if [ -n "$came" ]; then # once more: the first may have met a child that was still a copy of this shell
      came=''
      sleep 0.2
      kill -TERM "$child" 2>/dev/null
    fi
    wait "$child"
    now=$?
    [ -n "$ended" ] && [ "$now" -eq 127 ] || ended=$now # 127: waited for already, the status before was its own
    [ -n "$came" ] && [ "$ended" -gt 128 ] || break     # a signal ends `wait`, the command may still be saving
  done
  child=''
}

while :; do
  run "$@"
  status=$ended
  [ "$status" -eq 75 ] && [ -z "$stop" ] || exit "$status"
  echo "loop.sh: interrupted, again in ${LOOP_PAUSE:-5} s" >&2
  run sleep "${LOOP_PAUSE:-5}"
  [ -z "$stop" ] || exit "$status"
done
