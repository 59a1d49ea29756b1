//! Vector instructions behind one trait, and the choice among them when the program runs.

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use portable::Portable;

/// Registers of one kind of processor, and what the kernels do with them.
///
/// The functions are unsafe because an implementation may need instructions that not every processor has, and because
/// they read and write `LANES` elements at an address, which need not be aligned. They must be inlined into a function
/// that is compiled for those instructions, see [`Level::run`].
pub(crate) trait Isa: Copy {
    /// Some float32 lanes.
    type V: Copy;
    /// The sixteen values that four bits can stand for.
    type Table: Copy;
    /// Lanes of `V`; divides 32.
    const LANES: usize;
    /// Rows of activations that one tile of a product holds in registers, beside four columns.
    const TILE: usize;

    unsafe fn zero() -> Self::V;
    unsafe fn splat(value: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, value: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// a * b + c, rounded once where the processor can.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// To the nearest whole number.
    unsafe fn round(a: Self::V) -> Self::V;
    /// a * 2^n for whole n in -126..=127.
    unsafe fn scale(a: Self::V, n: Self::V) -> Self::V;
    unsafe fn largest(a: Self::V) -> f32;
    /// The sums of four registers' lanes.
    unsafe fn sums(a: [Self::V; 4]) -> [f32; 4];

    /// Which lane comes in its turn where [`Isa::sums`] adds in pairs: the first with the second, the third with the
    /// fourth, then these sums likewise.
    #[inline(always)]
    fn lane(turn: usize) -> usize {
        turn
    }

    /// `LANES` rows of as many numbers, `stride` apart, become columns: `apart` apart.
    #[inline(always)]
    unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, apart: usize) {
        for i in 0..Self::LANES {
            for j in 0..Self::LANES {
                *to.add(j * apart + i) = *from.add(i * stride + j);
            }
        }
    }

    /// A float16.
    unsafe fn half(from: *const u8) -> f32;
    /// A float16 in all lanes.
    unsafe fn spread(from: *const u8) -> Self::V;
    /// Two float16s, each in all lanes.
    unsafe fn pair(from: *const u8) -> (Self::V, Self::V);
    /// `LANES` float16s.
    unsafe fn halves(from: *const u8) -> Self::V;
    /// `LANES` bfloat16s.
    unsafe fn bfloats(from: *const u8) -> Self::V;
    /// `LANES` signed bytes.
    unsafe fn bytes(from: *const u8) -> Self::V;
    /// q * d + m for q of 0 to 15; both arguments have equal lanes.
    unsafe fn table(d: Self::V, m: Self::V) -> Self::Table;
    /// The table's values for the lower or upper halves of `LANES` bytes.
    unsafe fn nibbles(table: Self::Table, from: *const u8, upper: bool) -> Self::V;
    /// Numbers of more than four bits: half of each byte of `low`, and above it what `mask` leaves of each byte of `top`,
    /// shifted down.
    unsafe fn topped(low: *const u8, upper: bool, top: *const u8, shift: u32, mask: u8) -> Self::V;

    /// Asks for memory that will be read soon; the address need not be one that can be.
    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}

    /// The sum of a register's lanes, in the order of [`Isa::sums`].
    #[inline(always)]
    unsafe fn sum(a: Self::V) -> f32 {
        Self::sums([a; 4])[0]
    }

    /// e^a to about 1e-7 of itself for a in -87..=88, and the value at the nearer end beyond.
    #[inline(always)]
    unsafe fn exp(a: Self::V) -> Self::V {
        let a = Self::min(Self::max(a, Self::splat(-87.0)), Self::splat(88.0));
        let n = Self::round(Self::mul(a, Self::splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts, the first exact in few bits, so that the remainder loses nothing.
        let r = Self::fma(n, Self::splat(-355.0 / 512.0), a);
        let r = Self::fma(n, Self::splat(2.121_944_4e-4), r);
        // Taylor to the seventh power: |r| is at most half of ln 2.
        let mut sum = Self::splat(1.0 / 5040.0);
        for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            sum = Self::fma(sum, r, Self::splat(c));
        }
        Self::scale(sum, n)
    }
}

/// Work that can be compiled for every kind of processor.
pub(crate) trait Task {
    /// Does it.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `S`; further needs are those of whoever made the task.
    unsafe fn run<S: Isa>(self);
}

/// The kinds of processors that there are kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Every processor.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW and VL as well.
    Avx512,
}

impl Level {
    /// The best that this processor can.
    #[must_use]
    pub fn detect() -> Self {
        Self::all().last().copied().unwrap_or(Self::Portable)
    }

    /// All that this processor can, best last.
    #[must_use]
    pub fn all() -> &'static [Self] {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            let wide = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl");
            return if wide { &[Self::Portable, Self::Avx2, Self::Avx512] } else { &[Self::Portable, Self::Avx2] };
        }
        &[Self::Portable]
    }

    /// Numbers in a register.
    pub(crate) fn lanes(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => x86::Avx512::LANES,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => x86::Avx2::LANES,
            _ => Portable::LANES,
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Does a task with the instructions of this level.
    ///
    /// # Safety
    ///
    /// The level is one of [`Level::all`]; further needs are the task's.
    #[inline]
    pub(crate) unsafe fn run<T: Task>(self, task: T) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => x86::run_avx512(task),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => x86::run_avx2(task),
            _ => task.run::<Portable>(),
        }
    }
}
