-- Notes that a worker holds prefixes, for as long as its lease runs.
-- KEYS[1] sorted set of leases, as in register.lua
-- KEYS[2] sorted set: eight bytes that name a prefix, scored by the millisecond at which it was noted
-- ARGV[1] worker, ARGV[2] the names, one after another, ARGV[3] most names to keep: the oldest go,
-- ARGV[4] longest lease in milliseconds
-- returns how many are kept; 0 for a worker without a lease
own(KEYS[1], 'zset')
own(KEYS[2], 'zset')
local now = now_ms()
local ends = math.min(redis.call('ZSCORE', KEYS[1], ARGV[1]) or 0, now + ARGV[4])
if ends <= now then
    return 0
end
for first = 1, #ARGV[2], 8 do
    redis.call('ZADD', KEYS[2], now, string.sub(ARGV[2], first, first + 7))
end
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - ARGV[3])
redis.call('PEXPIREAT', KEYS[2], as_text(ends))
return redis.call('ZCARD', KEYS[2])
