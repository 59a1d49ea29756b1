//! Plain Rust, which the compiler may turn into whatever vectors the processor has.

use super::Isa;

/// Eight lanes in an array.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

type V = [f32; 8];

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> V {
    std::array::from_fn(f)
}

/// The float32 of a float16's bits.
pub(super) fn half(bits: u16) -> f32 {
    let sign = if bits >> 15 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (bits >> 10 & 31, f32::from(bits & 1023));
    let size = match exponent {
        0 => fraction * f32::from_bits((127 - 24) << 23),
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1024.0 + fraction) * f32::from_bits((u32::from(exponent) + 127 - 25) << 23),
    };
    sign * size
}

#[inline(always)]
unsafe fn word(from: *const u8, index: usize) -> u16 {
    u16::from_le_bytes([*from.add(2 * index), *from.add(2 * index + 1)])
}

#[inline(always)]
fn nibble(byte: u8, upper: bool) -> u8 {
    if upper { byte >> 4 } else { byte & 15 }
}

impl Isa for Portable {
    type V = V;
    type Table = (V, V);
    const LANES: usize = 8;
    const TILE: usize = 2;

    #[inline(always)]
    unsafe fn zero() -> V {
        [0.0; 8]
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> V {
        [value; 8]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> V {
        from.cast::<V>().read_unaligned()
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: V) {
        to.cast::<V>().write_unaligned(value);
    }

    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        each(|i| a[i] + b[i])
    }

    #[inline(always)]
    unsafe fn sub(a: V, b: V) -> V {
        each(|i| a[i] - b[i])
    }

    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        each(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn div(a: V, b: V) -> V {
        each(|i| a[i] / b[i])
    }

    #[inline(always)]
    unsafe fn max(a: V, b: V) -> V {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn min(a: V, b: V) -> V {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    // Not `mul_add`, which calls a function where the processor has no such instruction.
    #[inline(always)]
    unsafe fn fma(a: V, b: V, c: V) -> V {
        each(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    unsafe fn round(a: V) -> V {
        each(|i| a[i].round_ties_even())
    }

    #[inline(always)]
    unsafe fn scale(a: V, n: V) -> V {
        each(|i| a[i] * f32::from_bits(((n[i] as i32 + 127) as u32) << 23))
    }

    #[inline(always)]
    unsafe fn largest(a: V) -> f32 {
        a.iter().copied().fold(a[0], f32::max)
    }

    #[inline(always)]
    unsafe fn sums(a: [V; 4]) -> [f32; 4] {
        a.map(|v| ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])))
    }

    fn lane(turn: usize) -> usize {
        [0, 4, 2, 6, 1, 5, 3, 7][turn]
    }

    #[inline(always)]
    unsafe fn half(from: *const u8) -> f32 {
        half(word(from, 0))
    }

    #[inline(always)]
    unsafe fn spread(from: *const u8) -> V {
        [half(word(from, 0)); 8]
    }

    #[inline(always)]
    unsafe fn pair(from: *const u8) -> (V, V) {
        ([half(word(from, 0)); 8], [half(word(from, 1)); 8])
    }

    #[inline(always)]
    unsafe fn halves(from: *const u8) -> V {
        each(|i| half(word(from, i)))
    }

    #[inline(always)]
    unsafe fn bfloats(from: *const u8) -> V {
        each(|i| f32::from_bits(u32::from(word(from, i)) << 16))
    }

    #[inline(always)]
    unsafe fn bytes(from: *const u8) -> V {
        each(|i| f32::from(from.add(i).cast::<i8>().read()))
    }

    #[inline(always)]
    unsafe fn table(d: V, m: V) -> (V, V) {
        (d, m)
    }

    #[inline(always)]
    unsafe fn nibbles((d, m): (V, V), from: *const u8, upper: bool) -> V {
        each(|i| f32::from(nibble(*from.add(i), upper)) * d[i] + m[i])
    }

    #[inline(always)]
    unsafe fn topped(low: *const u8, upper: bool, top: *const u8, shift: u32, mask: u8) -> V {
        each(|i| f32::from(nibble(*low.add(i), upper) | (*top.add(i) >> shift & mask) << 4))
    }
}
