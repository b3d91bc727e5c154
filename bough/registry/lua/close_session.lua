-- Closes a session, whoever claimed it: only a newer epoch, granted to nobody, is kept for a while.
-- KEYS[1..4] as in record.lua
-- ARGV[1] its name in the ledger, ARGV[2] closer, unique for each call, ARGV[3] milliseconds to keep the epoch
-- returns the epoch in decimal, the record and the tokens (false if missing); or 0 if the session does not exist or is
-- closed already
own_entry(KEYS[1], KEYS[2])
local is_repeated = redis.call('HGET', KEYS[1], 'ended') == ARGV[2] -- a retry after a lost reply
if is_repeated then
    return {as_text(count(KEYS[1], 'epoch')), false, false}
end
local record, tokens = redis.call('HGET', KEYS[1], 'record'), redis.call('GET', KEYS[2])
if not record and redis.call('HEXISTS', KEYS[1], 'holder') == 0 then
    return 0
end
local epoch = math.max(count(KEYS[1], 'epoch') + 1, now_us())
bury(KEYS[1], KEYS[2], epoch, ARGV[3])
redis.call('HSET', KEYS[1], 'ended', ARGV[2])
enter(KEYS[3], KEYS[4], ARGV[1], OVERHEAD, ARGV[3], {math.huge, math.huge})
return {as_text(epoch), record, tokens}
