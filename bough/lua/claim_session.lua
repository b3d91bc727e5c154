-- Makes a session the claimant's: an epoch that is greater than any before it, by the server's own clock.
-- KEYS[1] hash, KEYS[2] string, as in record.lua
-- ARGV[1] claimant, ARGV[2] milliseconds to keep what has a record, ARGV[3] or what has none
-- ARGV[4] the epoch that the claimant has had so far, if nobody else may have had one since; empty claims it anyway
-- returns the epoch in decimal, the record and the tokens; of the last two false where there are none; or -1 where
-- somebody else has had it since
own(KEYS[1], 'hash')
own(KEYS[2], 'string')
if ARGV[4] ~= '' and count(KEYS[1], 'epoch') > tonumber(ARGV[4]) then
    return -1
end
local epoch = as_text(math.max(count(KEYS[1], 'epoch') + 1, now_us()))
local record = redis.call('HGET', KEYS[1], 'record')
local keep = record and ARGV[2] or ARGV[3]
redis.call('HSET', KEYS[1], 'epoch', epoch, 'holder', ARGV[1])
redis.call('PEXPIRE', KEYS[1], keep)
redis.call('PEXPIRE', KEYS[2], keep)
return {epoch, record, redis.call('GET', KEYS[2])}
