//! How weights are stored: the block layouts of GGUF files (https://github.com/ggml-org/ggml, `ggml-common.h`) and plain
//! numbers, and how 32 weights become float32 lanes.

use crate::isa::Isa;

/// Lanes of 32 weights; the first `32 / LANES` are used.
pub(crate) type Lanes<S> = [<S as Isa>::V; 4];

/// One storage format.
pub(crate) trait Blocks {
    /// Weights in a block, a multiple of 32.
    const WEIGHTS: usize;
    /// Bytes of a block.
    const BYTES: usize;

    /// Weights 32 * `part` and following of a block.
    ///
    /// # Safety
    ///
    /// The block can be read, the part lies in it, and the processor has the instructions of `S`.
    unsafe fn part<S: Isa>(block: *const u8, part: usize) -> Lanes<S>;
}

/// Storage formats that the kernels know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Little-endian float32.
    F32,
    /// Little-endian float16.
    F16,
    /// Little-endian bfloat16.
    Bf16,
    /// 32 weights (q - 8) * d of four bits.
    Q4_0,
    /// 32 weights q * d + m of four bits.
    Q4_1,
    /// 32 weights q * d of eight bits.
    Q8_0,
    /// 256 weights of four bits, a scale and an offset of six bits for each 32.
    Q4K,
    /// 256 weights of five bits, a scale and an offset of six bits for each 32.
    Q5K,
    /// 256 weights of six bits, a scale of eight bits for each 16.
    Q6K,
}

impl Format {
    /// All there are.
    pub const ALL: [Self; 9] =
        [Self::F32, Self::F16, Self::Bf16, Self::Q4_0, Self::Q4_1, Self::Q8_0, Self::Q4K, Self::Q5K, Self::Q6K];

    /// The format that GGUF calls by this name.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// GGUF's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Weights in a block: a matrix's width is a multiple of it.
    #[must_use]
    pub fn weights(self) -> usize {
        self.with(Sizes).0
    }

    /// Bytes of a row of `width` weights.
    #[must_use]
    pub fn row_bytes(self, width: usize) -> usize {
        let (weights, bytes) = self.with(Sizes);
        width / weights * bytes
    }

    /// Goes from the value to the type.
    #[inline]
    pub(crate) fn with<U: Use>(self, user: U) -> U::Out {
        match self {
            Self::F32 => user.with::<F32>(),
            Self::F16 => user.with::<F16>(),
            Self::Bf16 => user.with::<Bf16>(),
            Self::Q4_0 => user.with::<Q4_0>(),
            Self::Q4_1 => user.with::<Q4_1>(),
            Self::Q8_0 => user.with::<Q8_0>(),
            Self::Q4K => user.with::<Q4K>(),
            Self::Q5K => user.with::<Q5K>(),
            Self::Q6K => user.with::<Q6K>(),
        }
    }
}

/// What is done with a format's type, see [`Format::with`].
pub(crate) trait Use {
    type Out;
    fn with<B: Blocks>(self) -> Self::Out;
}

struct Sizes;

impl Use for Sizes {
    type Out = (usize, usize);
    fn with<B: Blocks>(self) -> (usize, usize) {
        (B::WEIGHTS, B::BYTES)
    }
}

struct F32;
struct F16;
struct Bf16;
struct Q4_0;
struct Q4_1;
struct Q8_0;
struct Q4K;
struct Q5K;
struct Q6K;

/// The lanes of 32 weights from a function of the first weight's index in each register.
#[inline(always)]
unsafe fn lanes<S: Isa>(make: impl Fn(usize) -> S::V) -> Lanes<S> {
    let mut out = [S::zero(); 4];
    for (i, lane) in out.iter_mut().enumerate().take(32 / S::LANES) {
        *lane = make(i * S::LANES);
    }
    out
}

impl Blocks for F32 {
    const WEIGHTS: usize = 32;
    const BYTES: usize = 128;

    #[inline(always)]
    unsafe fn part<S: Isa>(block: *const u8, _part: usize) -> Lanes<S> {
        lanes::<S>(|at| S::load(block.cast::<f32>().add(at)))
    }
}

impl Blocks for F16 {
    const WEIGHTS: usize = 32;
    const BYTES: usize = 64;

    #[inline(always)]
    unsafe fn part<S: Isa>(block: *const u8, _part: usize) -> Lanes<S> {
        lanes::<S>(|at| S::halves(block.add(2 * at)))
    }
}

impl Blocks for Bf16 {
    const WEIGHTS: usize = 32;
    const BYTES: usize = 64;

    #[inline(always)]
    unsafe fn part<S: Isa>(block: *const u8, _part: usize) -> Lanes<S> {
        lanes::<S>(|at| S::bfloats(block.add(2 * at)))
    }
}

/// Sixteen bytes whose lower halves are the first 16 weights and whose upper halves the others.
#[inline(always)]
unsafe fn packed_nibbles<S: Isa>(table: S::Table, from: *const u8) -> Lanes<S> {
    lanes::<S>(|at| S::nibbles(table, from.add(at % 16), at >= 16))
}

impl Blocks for Q4_0 {
    const WEIGHTS: usize = 32;
    const BYTES: usize = 18;

    #[inline(always)]
    unsafe fn part<S: Isa>(block: *const u8, _part: usize) -> Lanes<S> {
        let d = S::spread(block);
        packed_nibbles::<S>(S::table(d, S::mul(d, S::splat(-8.0))), block.add(2))
    }
}

impl Blocks for Q4_1 {
    const WEIGHTS: usize = 32;
    const BYTES: usize = 20;

    #[inline(always)]
    unsafe fn part<S: Isa>(block: *const u8, _part: usize) -> Lanes<S> {
        let (d, m) = S::pair(block);
        packed_nibbles::<S>(S::table(d, m), block.add(4))
    }
}

impl Blocks for Q8_0 {
    const WEIGHTS: usize = 32;
    const BYTES: usize = 34;

    #[inline(always)]
    unsafe fn part<S: Isa>(block: *const u8, _part: usize) -> Lanes<S> {
        let d = S::spread(block);
        lanes::<S>(|at| S::mul(S::bytes(block.add(2 + at)), d))
    }
}

/// Scale and offset of 32 weights of six bits each. Twelve bytes hold eight of both: four of each whole, and the lower
/// bits of the others with their upper two bits on top of the whole ones.
#[inline(always)]
unsafe fn scale_and_offset(packed: *const u8, part: usize) -> (f32, f32) {
    let at = |i: usize| *packed.add(i);
    let (scale, offset) = if part < 4 {
        (at(part) & 63, at(part + 4) & 63)
    } else {
        ((at(part + 4) & 15) | (at(part - 4) >> 6) << 4, (at(part + 4) >> 4) | (at(part) >> 6) << 4)
    };
    (f32::from(scale), f32::from(offset))
}

impl Blocks for Q4K {
    const WEIGHTS: usize = 256;
    const BYTES: usize = 144;

    #[inline(always)]
    unsafe fn part<S: Isa>(block: *const u8, part: usize) -> Lanes<S> {
        let (scale, offset) = scale_and_offset(block.add(4), part);
        let (d, m) = S::pair(block);
        let table = S::table(S::mul(d, S::splat(scale)), S::mul(m, S::splat(-offset)));
        let from = block.add(16 + part / 2 * 32);
        lanes::<S>(|i| S::nibbles(table, from.add(i), part % 2 == 1))
    }
}

impl Blocks for Q5K {
    const WEIGHTS: usize = 256;
    const BYTES: usize = 176;

    #[inline(always)]
    unsafe fn part<S: Isa>(block: *const u8, part: usize) -> Lanes<S> {
        let (scale, offset) = scale_and_offset(block.add(4), part);
        let (d, m) = S::pair(block);
        let (d, m) = (S::mul(d, S::splat(scale)), S::mul(m, S::splat(-offset)));
        let (low, top) = (block.add(48 + part / 2 * 32), block.add(16));
        let mut out = [S::zero(); 4];
        // Not by `lanes`: as large a closure would become a function, called for every register.
        for (i, lane) in out.iter_mut().enumerate().take(32 / S::LANES) {
            let at = i * S::LANES;
            *lane = S::fma(S::topped(low.add(at), part % 2 == 1, top.add(at), part as u32, 1), d, m);
        }
        out
    }
}

impl Blocks for Q6K {
    const WEIGHTS: usize = 256;
    const BYTES: usize = 210;

    #[inline(always)]
    unsafe fn part<S: Isa>(block: *const u8, part: usize) -> Lanes<S> {
        let (half, quarter) = (part / 4, part % 4);
        let low = block.add(64 * half + 32 * (quarter % 2));
        let top = block.add(128 + 32 * half);
        let scales = block.add(192 + 8 * half + 2 * quarter).cast::<i8>();
        let d = S::half(block.add(208));
        let mut out = [S::zero(); 4];
        for (i, lane) in out.iter_mut().enumerate().take(32 / S::LANES) {
            let at = i * S::LANES;
            let scale = S::splat(d * f32::from(*scales.add(at / 16)));
            let q = S::topped(low.add(at), quarter >= 2, top.add(at), 2 * quarter as u32, 3);
            *lane = S::mul(S::sub(q, S::splat(32.0)), scale);
        }
        out
    }
}
