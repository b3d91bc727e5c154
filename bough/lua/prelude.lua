-- Before every script: the server's clock, and care with what others may have left under our keys.
-- Scripts write after they have asked for the time, so they are replicated by their effects (Redis 5 and later). Some
-- name keys that are not among KEYS: one server or a replicated one will do, Redis Cluster will not.

local function now_us()
    local now = redis.call('TIME')
    return now[1] * 1000000 + now[2]
end

local function now_ms()
    return math.floor(now_us() / 1000)
end

-- A value of another type is none of ours; it goes, or it would be in the way for ever.
local function own(key, kind)
    local found = redis.call('TYPE', key).ok
    if found ~= kind and found ~= 'none' then
        redis.call('DEL', key)
    end
end

-- A whole number from a hash, small enough to be exact with one more; 0 for none and for nonsense.
local function count(key, name)
    local text = redis.call('HGET', key, name)
    local number = text and string.match(text, '^%d+$') and tonumber(text) or 0
    return number < 2 ^ 52 and number or 0
end

local function as_text(number)
    return string.format('%.0f', number)
end
