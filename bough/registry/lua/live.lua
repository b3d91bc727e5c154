-- Lists the workers with a valid lease. It writes a key, to fail on an index that cannot renew leases.
-- KEYS[1] sorted set of leases, KEYS[2] hash of records, as in register.lua
-- KEYS[3] string: the millisecond of the last listing
-- ARGV[1] milliseconds to keep that
-- returns their records
own(KEYS[1], 'zset')
own(KEYS[2], 'hash')
redis.call('SET', KEYS[3], as_text(now_ms()), 'PX', ARGV[1])
local records = {}
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now_ms(), '+inf', 'LIMIT', 0, MOST_WORKERS)) do
    if redis.call('HSTRLEN', KEYS[2], worker) <= MOST_WORKER then
        records[#records + 1] = redis.call('HGET', KEYS[2], worker) or nil
    end
end
return records
