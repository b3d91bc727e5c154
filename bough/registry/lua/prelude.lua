-- Common part of all scripts: the server's clock, and checks of values that others may have written to our keys.
-- Scripts write after reading the time, so they are replicated by effects (Redis 5 and later). They use only the keys
-- in KEYS, whose hash tag is the namespace, so that they run in a cluster.

local STALE, INCOMPLETE, WRITTEN, FULL = -1, 0, 1, -2 -- replies of writing scripts
local OVERHEAD = 512 -- bytes of an entry besides its record and tokens
local MOST_VICTIMS = 256 -- entries to evict at once
local MOST_RECORD, MOST_TOKENS, MOST_NAME = 2 ^ 22, 2 ^ 26, 4096 -- bytes that ours do not reach
local MOST_WORKERS, MOST_WORKER = 4096, 2 ^ 16 -- to list, and bytes of one's record

local function now_us()
    local now = redis.call('TIME')
    return now[1] * 1000000 + now[2]
end

local function now_ms()
    return math.floor(now_us() / 1000)
end

-- Deletes a value of another type, which is not ours and would block the key forever.
local function own(key, kind)
    local found = redis.call('TYPE', key).ok
    if found ~= kind and found ~= 'none' then
        redis.call('DEL', key)
    end
end

-- The same for a session or a request, of which it forgets a value that is longer than any of ours: it would fill the
-- quota, and the memory of whoever reads it.
local function own_entry(hash, tokens)
    own(hash, 'hash')
    own(tokens, 'string')
    if redis.call('HSTRLEN', hash, 'record') > MOST_RECORD or redis.call('STRLEN', tokens) > MOST_TOKENS then
        redis.call('HDEL', hash, 'record')
        redis.call('DEL', tokens)
    end
end

-- A whole number from a hash, small enough that adding 1 is exact; 0 if missing or malformed.
local function count(key, name)
    local text = redis.call('HSTRLEN', key, name) < 20 and redis.call('HGET', key, name)
    local number = text and string.match(text, '^%d+$') and tonumber(text) or 0
    return number < 2 ^ 52 and number or 0
end

local function as_text(number)
    return string.format('%.0f', number)
end

-- Entries are counted in a ledger: a sorted set of their names, scored by the millisecond at which each ends, and a
-- hash of the bytes that each takes, whose field without a name is their sum.

local function leave(ledger, sizes, name)
    local sum = count(sizes, '') - count(sizes, name)
    redis.call('ZREM', ledger, name)
    redis.call('HDEL', sizes, name)
    redis.call('HSET', sizes, '', as_text(math.max(sum, 0)))
end

-- Counts an entry that is about to be written or extended. If the quota would be exceeded, it is not counted: the reply
-- is FULL and the entries to evict first, those that expire soonest, with their expiry times.
-- `quota`: most entries, and most bytes.
local function enter(ledger, sizes, name, bytes, keep_ms, quota)
    own(ledger, 'zset')
    own(sizes, 'hash')
    for _, over in ipairs(redis.call('ZRANGEBYSCORE', ledger, '-inf', now_ms(), 'LIMIT', 0, MOST_VICTIMS)) do
        leave(ledger, sizes, over)
    end
    if redis.call('ZCARD', ledger) == 0 then
        redis.call('DEL', sizes) -- also resets a malformed sum
    end
    local num = redis.call('ZCARD', ledger) + (redis.call('ZSCORE', ledger, name) and 0 or 1)
    local sum = count(sizes, '') - count(sizes, name) + bytes
    if num > quota[1] or sum > quota[2] then
        -- Evict slightly more than needed, or the next entry would need an eviction again.
        local num_over, bytes_over = num - quota[1] + math.floor(quota[1] / 64), sum - quota[2] + math.floor(quota[2] / 64)
        local answer, first = {FULL}, redis.call('ZRANGE', ledger, 0, MOST_VICTIMS, 'WITHSCORES')
        -- Evict entries with an epoch alone last: without it a closed session could be written again.
        for _, is_bare in ipairs({false, true}) do
            for index = 1, #first, 2 do
                local size = count(sizes, first[index])
                local is_next = first[index] ~= name and (size <= OVERHEAD) == is_bare and #first[index] <= MOST_NAME
                if is_next and (num_over > 0 or bytes_over > 0) then
                    answer[#answer + 1], answer[#answer + 2] = first[index], first[index + 1]
                    num_over, bytes_over = num_over - 1, bytes_over - size
                end
            end
        end
        return answer
    end
    redis.call('ZADD', ledger, as_text(now_ms() + keep_ms), name)
    redis.call('HSET', sizes, name, as_text(bytes), '', as_text(math.max(sum, 0)))
    local last = redis.call('ZRANGE', ledger, -1, -1, 'WITHSCORES')[2]
    for _, key in ipairs({ledger, sizes}) do
        redis.call('PEXPIREAT', key, as_text(math.min(tonumber(last), now_ms() + 2 ^ 40)))
    end
    return nil
end

-- Reduces a forgotten session to its epoch, so that earlier claimants cannot write it any more.
local function bury(hash, tokens, epoch, keep_ms)
    redis.call('DEL', hash, tokens)
    redis.call('HSET', hash, 'epoch', as_text(epoch), 'ended', '1')
    redis.call('PEXPIRE', hash, keep_ms)
end
