-- Makes a session the claimant's: an epoch that is greater than any before it, by the server's own clock.
-- KEYS[1] hash, KEYS[2] string, as in record.lua
-- ARGV[1] claimant, other for every claim, ARGV[2] milliseconds to keep what has a record, ARGV[3] or what has none
-- ARGV[4] the epoch that the claimant has had so far, if nobody else may have had one since; empty claims it anyway
-- returns the epoch in decimal, the record and the tokens; of the last two false where there are none; or -1 where
-- somebody else has had it since
own(KEYS[1], 'hash')
own(KEYS[2], 'string')
local newest = count(KEYS[1], 'epoch')
local record = redis.call('HGET', KEYS[1], 'record')
local is_repeated = redis.call('HGET', KEYS[1], 'holder') == ARGV[1] -- the answer to it was lost
if not is_repeated then
    if ARGV[4] ~= '' and newest > tonumber(ARGV[4]) then
        return -1
    end
    newest = math.max(newest + 1, now_us())
    redis.call('HSET', KEYS[1], 'epoch', as_text(newest), 'holder', ARGV[1])
end
local keep = record and ARGV[2] or ARGV[3]
redis.call('PEXPIRE', KEYS[1], keep)
redis.call('PEXPIRE', KEYS[2], keep)
return {as_text(newest), record, redis.call('GET', KEYS[2])}
